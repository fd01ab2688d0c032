"""The policy: frozen base, adapter, full fine-tuning, teacher."""
