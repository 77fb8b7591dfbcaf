"""What a release consists of: ``make release`` writes it into ``dist``."""
