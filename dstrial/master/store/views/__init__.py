"""What is read of rows of several kinds at once, and never written: lists, searches, the page's rows."""
