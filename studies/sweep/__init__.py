"""Many runs of `qerl fit` from one YAML file, several at once, each resumed where it was cut off."""
