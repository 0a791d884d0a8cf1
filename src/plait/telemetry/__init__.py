"""What a run says of itself: metrics, spans, traces."""
