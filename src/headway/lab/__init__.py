"""The lab: routing policies on simulated fleets, through the same Router as the gateway."""
