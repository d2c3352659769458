"""Engine and router actors, and the fleet that supervises them."""
