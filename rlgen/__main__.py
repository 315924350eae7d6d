"""Runs the command line as `python -m rlgen`, the form that torchrun and accelerate launch."""

from rlgen.cli.app import main

main()
