"""Training: the loop, its data, its optimizer, and the proof that a cut equals one process."""
