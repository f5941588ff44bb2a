"""What the daemon tells of itself: the records of events and the bus that hands them on."""
