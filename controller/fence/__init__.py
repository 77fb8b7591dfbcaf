"""Taking back offers through an admission policy without giving memory out twice."""
