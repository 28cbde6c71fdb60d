"""What would happen: traces replayed on the production rules, without bytes and without waiting."""
