"""The pipeline schedule as data: IR, generators, lowering, checker, simulator. Standard library only."""
