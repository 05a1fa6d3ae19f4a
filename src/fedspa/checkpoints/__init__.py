"""What a run that was broken off goes on from."""
