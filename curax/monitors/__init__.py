"""What is measured of completions and changes nothing."""
