"""The nouns of plait. Standard library only: nothing here imports torch."""
