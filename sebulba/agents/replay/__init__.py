"""The replay on the update devices."""
