"""The language model as `training` and `sampling` share it: loading, LoRA layers, output head."""
