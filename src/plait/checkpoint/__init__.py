"""Tensors on disk: checkpoints and their commit, boxes between layouts, Hugging Face folders."""
