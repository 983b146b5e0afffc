"""What a trial will take: dry runs read, step time and memory predicted, the next candidates proposed."""
