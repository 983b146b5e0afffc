"""What trials report again and again: metrics and lines of logs, bounded."""
