"""What quantizing takes from a pretrained policy; see docs/measured.md."""
