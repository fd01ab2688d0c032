"""How far a sigma of the noise moves a policy; see docs/measured.md."""
