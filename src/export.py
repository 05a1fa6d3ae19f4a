"""Write a client's model of a finished run to a file that others can use.

    python src/export.py run=<a run's folder> client=7 format=torch
    python src/export.py run=<MLflow's id of a run> client=7 format=onnx model=local

Options:
    run=<run>         a run's folder, the name of one under outputs/, or the id that MLflow gave it
    client=7          whose model (from 0); the global one is everybody's
    format=torch      a program that torch alone loads; safetensors: the tensors and how to make the network;
                      onnx: checked with onnxruntime before it is written
    model=personal    local: as the client's last training left it, where the run has save.local=true; global
    out=<file>        where to write (outputs/exports/<run>/client7-personal.pt2)
"""

from __future__ import annotations

import sys

from fedspa.core.options import read_options
from fedspa.export.command import Options, export
from fedspa.runs.commands import main


def write(words: list[str]) -> None:
    """Write the file."""
    print("\n".join(export(read_options(Options, words))))


if __name__ == "__main__":
    sys.exit(main(write, __doc__))
