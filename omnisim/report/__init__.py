"""Results for people and programs: plain data first, then its renderings."""
