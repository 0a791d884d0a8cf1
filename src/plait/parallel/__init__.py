"""How a model is cut and run: one file a strand, joined in ``apply.py`` alone."""
