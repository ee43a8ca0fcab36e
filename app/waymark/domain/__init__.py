"""Pure: no clock, no network, no Redis, no environment."""
