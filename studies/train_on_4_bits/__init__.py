"""Should one train on 4 bits? The paper's claims put to the test, by many runs of `qerl fit`; see README.md."""
