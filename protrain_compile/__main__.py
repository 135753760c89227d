"""``python -m protrain_compile``: the `protrain` command, for launchers: ``torchrun -m protrain_compile demo``."""

import sys

from protrain_compile.cli import main

sys.exit(main())
