"""Bytes to `types` and back. The only code that knows JSON keys and protobuf field names."""
