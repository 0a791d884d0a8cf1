"""What a plan will take, before anything runs: time, bytes and the search for the best one. No torch."""
