// Runs the package that export.py makes, without Python: steps of different token counts on KV
// pools that this program owns, compared bit for bit with what eager torch made of the same steps.
//
//   attention attention.pt2 steps.pt
//
// Exit status 1: an error, or a bit differs.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Tensors = std::unordered_map<std::string, at::Tensor>;

struct Steps {
  std::vector<std::vector<at::Tensor>> inputs;  // x, positions, slots, context of each step
  std::vector<at::Tensor> outputs;              // what eager torch made of them
  Tensors pools;                                // the pools after the last step, by name
};

Steps load_steps(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto saved = torch::jit::pickle_load(bytes).toTuple();
  Steps steps;
  for (const c10::IValue& step : saved->elements()[0].toListRef()) {
    std::vector<at::Tensor>& inputs = steps.inputs.emplace_back();
    for (const c10::IValue& input : step.toTupleRef().elements())
      inputs.push_back(input.toTensor());
  }
  for (const c10::IValue& output : saved->elements()[1].toListRef()) {
    steps.outputs.push_back(output.toTensor());
  }
  for (const auto& pool : saved->elements()[2].toGenericDict()) {
    steps.pools.emplace(pool.key().toStringRef(), pool.value().toTensor());
  }
  return steps;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kInt), b.view(at::kInt));
}

bool same_bits(const Tensors& a, const Tensors& b) {
  for (const auto& [name, tensor] : a) {
    if (!same_bits(tensor, b.at(name))) return false;
  }
  return true;
}

Tensors clone(const Tensors& tensors) {
  Tensors clones;
  for (const auto& [name, tensor] : tensors) clones.emplace(name, tensor.clone());
  return clones;
}

bool run(const char* package_path, const char* steps_path) {
  const c10::InferenceMode inference_mode;
  const Steps steps = load_steps(steps_path);
  torch::inductor::AOTIModelPackageLoader package(package_path);

  // In place of the package's own. The package keeps their addresses: they must outlive its use.
  Tensors pools;
  for (const auto& [name, pool] : steps.pools) pools.emplace(name, at::zeros_like(pool));
  package.load_constants(pools, /*use_inactive=*/false, /*check_full_update=*/false,
                         /*user_managed=*/true);

  bool all_same = true;
  for (size_t i = 0; i < steps.inputs.size(); ++i) {
    const at::Tensor output = package.run(steps.inputs[i])[0];
    const bool same = same_bits(output, steps.outputs[i]);
    std::printf("step %zu: %lld tokens, sum %.9g, %s\n", i, static_cast<long long>(output.size(0)),
                output.sum().item<double>(), same ? "same bits as eager" : "DIFFERS from eager");
    all_same = all_same && same;
  }
  const bool same_pools = same_bits(pools, steps.pools);
  std::printf("pools: %s\n", same_pools ? "same bits as eager" : "DIFFER from eager");

  // A slot that no pool has: an exception, and no row is written, those of the good slots included.
  std::vector<at::Tensor> bad = steps.inputs.back();
  bad[0] = -bad[0];
  bad[2] = bad[2].clone();
  bad[2][-1] = pools.begin()->second.size(0);
  const Tensors before = clone(pools);
  bool refused = false;
  try {
    package.run(bad);
  } catch (const std::exception& error) {
    refused = true;
    std::printf("bad slot: %s\n", error.what());
  }
  const bool kept = same_bits(pools, before);
  std::printf("bad slot: %s, pools %s\n", refused ? "refused" : "NOT REFUSED",
              kept ? "kept" : "CHANGED");
  return all_same && same_pools && refused && kept;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s attention.pt2 steps.pt\n", argv[0]);
    return 1;
  }
  // Registers the op, before a package that names it is loaded.
  if (dlopen(ROPEPOOL_LIBRARY, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  try {
    return run(argv[1], argv[2]) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
