"""What distillation brings back of what quantizing took; see docs/distillation.md."""
