"""Starting, finding and stopping a daemon, and examining the machine."""
