"""`python -m qerl_pl` is `qerl`."""

import sys

from qerl_pl.cli.main import main

sys.exit(main())
