"""`python -m comlrl_ds …`, the form that the deepspeed launcher starts (`deepspeed --module comlrl_ds train run.yaml`)."""

import sys

from comlrl_ds.cli import main

if __name__ == "__main__":
    sys.exit(main())
