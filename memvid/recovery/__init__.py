"""Opening a store after any end, making its index anew, and repairing damaged or missing files."""
