"""What processes of `fit_helpers` import, once for all and without searching it for garbage, as `qerl` does."""

import gc

gc.disable()
import fit_helpers  # noqa: E402, F401

import qerl_pl.cli.main  # noqa: E402, F401

gc.freeze()
gc.enable()
