"""Engine actors, the router actor and the fleet that supervises them."""
