"""plait: plans, runs, proves and explains model-parallel training of transformers."""
