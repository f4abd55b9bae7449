"""Linear methods: how a layer stores its weight and multiplies by it, per device and quantization scheme."""
