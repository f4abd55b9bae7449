"""What the driver and the ranks both speak: configuration, errors, protocol, channel. Never imports torch."""
