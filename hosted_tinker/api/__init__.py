"""The HTTP API: one file per resource of the SDK. Each route decodes, makes one call, encodes."""
