"""GPUs as values, made from the product facts, without any hardware behind them."""

from __future__ import annotations

from driver.model.gpu import Gpu, MigMode, Placement, Profile
from driver.simulator.products import find_product

H100 = "NVIDIA H100 80GB HBM3"
MIB = 1 << 20


def gpu_of(product_name: str = H100, minor: int = 0) -> Gpu:
    """One GPU of a product that the facts know."""
    product = find_product(product_name)
    assert product is not None
    profiles = tuple(
        Profile(
            name=profile.name,
            id=profile.id,
            compute_slices=profile.slices,
            memory_bytes=(profile.memory_mib or 0) * MIB,
            multiprocessors=profile.multiprocessors or 0,
            max_instances=profile.max_instances,
            jpeg_engines=profile.jpeg,
            ofa_engines=profile.ofa,
            placements=tuple(Placement(start, profile.size) for start in profile.starts),
        )
        for profile in product.profiles
    )
    return Gpu(
        uuid=f"GPU-{minor}",
        index=minor,
        minor=minor,
        product_name=product.name,
        brand="Nvidia",
        architecture=product.architecture,
        cuda_compute_capability="9.0.0",
        driver_version="580.95.5",
        cuda_driver_version="13.0.0",
        pci_bus_id=f"0000:{minor:02x}:00.0",
        pcie_root=f"pci0000:{minor:02x}",
        numa_node=0,
        memory_bytes=product.memory_mib * MIB,
        multiprocessors=product.multiprocessors,
        mig_capable=product.mig_capable,
        memory_type=None,
        memory_bandwidth=None,
        pcie_generation=None,
        pcie_width=None,
        nvlink=None,
        nvlink_clique=None,
        fabric_clique=None,
        ecc=None,
        mig_mode=MigMode.DISABLED if product.profiles else MigMode.UNSUPPORTED,
        memory_slices=product.memory_slices if profiles else 1,
        profiles=profiles,
        simulated=True,
    )
