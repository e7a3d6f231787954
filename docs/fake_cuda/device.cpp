// A CUDA device for autograd on a machine without a GPU: one device, whose streams do nothing.
//
// Autograd's engine asks the guard of a tensor's device for streams, and the hooks of CUDA whether a
// device is in use. Fake tensors need no more of a device. What else is asked of the hooks raises an
// error, as in a build of torch without CUDA.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  Device getDevice() const override { return Device(CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
};

extern "C" void pretend() {
  static Guard guard;
  static Hooks hooks;
  c10::impl::device_guard_impl_registry[static_cast<int>(CUDA)].store(&guard);
  // torch has made its hooks by now and keeps them, so they get the methods of these.
  auto& own = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&own) = *reinterpret_cast<void**>(&hooks);
}
