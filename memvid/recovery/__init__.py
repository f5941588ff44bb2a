"""Opening a store after any end, making its index anew, and repairing what is damaged or missing."""
