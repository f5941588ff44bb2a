"""The blocking and the asyncio client, and the subscription to events."""
