"""Ray itself: starting or joining it, placement, named actors and calls with deadlines."""
