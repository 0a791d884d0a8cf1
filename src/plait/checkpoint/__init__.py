"""Tensors on disk: plait's weight folders, boxes between layouts, Hugging Face folders."""
