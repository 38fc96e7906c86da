"""Which draft tree pays for a pair on a device: measured acceptance, measured forward times, the best quotient."""
