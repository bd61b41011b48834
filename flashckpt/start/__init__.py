"""How a rank joins a launch, takes a job over, and leaves."""
