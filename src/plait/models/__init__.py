"""One-device transformers in plain torch, free of parallelism: the reference every cut is held against."""
