"""The rules of ``tessera lint`` for DeviceClasses and claims."""
