"""What people write: process settings and opaque device parameters."""
