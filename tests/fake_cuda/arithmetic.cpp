// Arithmetic for the fake CUDA: what an operator's kernels would have computed is computed by the operator's CPU kernel.
//
// Device memory is host memory here. Each operator first takes its real CUDA path, which allocates, launches kernels that do nothing, and moves
// the simulated timeline; then its CPU kernel runs on the same bytes and its results are written where the CUDA path put them. So kernel
// names, temporaries, workspaces and the profiler's view are those of CUDA, and the values are those of a CPU.
//
// What is not simulated: the arithmetic is done when the operator is issued. A program that reads device memory on another stream too early sees the
// new values; one that reads a copy in host memory too early sees the old bytes, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>
#include <torch/version.h>

#include <cstring>
#include <map>
#include <set>
#include <string>

extern "C" {
void fc_flush(void);                // carry out all that is pending and ends in device memory
int fc_launch(void *stream, const char *name, double ns);
void fc_arithmetic(void);           // copies to the host keep the bytes of the moment at which they were issued
int fc_capturing(void);
void fc_note(const char *function);
}

namespace {
using c10::IValue;
using torch::jit::Stack;

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
using Kernel = c10::SafeKernelFunction;
Kernel kernel_of(const c10::OperatorHandle &op, c10::DispatchKey key) { return op.getComputedKernelForDispatchKey(key); }
#else  // the dispatch table is private; an explicit instantiation may name private members
using Kernel = c10::KernelFunction;
template <auto member> struct Reach { friend const auto &entry_of(const c10::OperatorHandle &op) { return (op.*member)->op; } };
const auto &entry_of(const c10::OperatorHandle &);
template struct Reach<&c10::OperatorHandle::operatorDef_>;
Kernel kernel_of(const c10::OperatorHandle &op, c10::DispatchKey key) { return entry_of(op).lookup(c10::DispatchKeySet(key)); }
#endif

thread_local int depth = 0;
struct Nested {
    Nested() { ++depth; }
    ~Nested() { --depth; }
};

bool on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.is_cuda(); }

at::Tensor host_view(const at::Tensor &tensor) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (!tensor.numel() || !tensor.storage().data()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

IValue down(const IValue &value, const at::Generator &generator) {
    if (value.isTensor()) return on_device(value.toTensor()) ? IValue(host_view(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> views;
        for (const at::Tensor &tensor : value.toTensorList()) views.push_back(on_device(tensor) ? host_view(tensor) : tensor);
        return views;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> views;
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorList())
            views.push_back(tensor && on_device(*tensor) ? std::optional(host_view(*tensor)) : tensor);
        return views;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
    if (value.isGenerator()) return generator;
    return value;
}

// Write what the CPU computed into the tensor that the CUDA path returned.
void give(const at::Tensor &to, const at::Tensor &from) {
    if (!on_device(to) || !from.defined()) return;
    if (!to.sizes().equals(from.sizes())) {
        if (!to.numel() && !from.numel()) return;
        to.resize_(from.sizes());
    }
    at::Tensor view = host_view(to);
    if (from.is_cpu() && view.data_ptr() != from.data_ptr()) view.copy_(from);
}
void give(const IValue &to, const IValue &from) {
    if (to.isTensor() && from.isTensor()) give(to.toTensor(), from.toTensor());
    else if (to.isTensorList() && from.isTensorList()) {
        auto target = to.toTensorList(), source = from.toTensorList();
        for (size_t i = 0; i < target.size() && i < source.size(); i++) give(target.get(i), source.get(i));
    }
}

// A CPU generator whose stream follows from the CUDA generator's seed and place.
at::Generator generator_of(const Stack &arguments) {
    at::Generator device = at::globalContext().defaultGenerator(at::Device(at::kCUDA, c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice().index()));
    for (const IValue &value : arguments)
        if (value.isGenerator() && value.toGenerator().device().is_cuda()) device = value.toGenerator();
    at::Tensor state = device.get_state();
    uint64_t words[2] = {0, 0};
    std::memcpy(words, state.data_ptr(), std::min<size_t>(sizeof words, state.nbytes()));
    return at::make_generator<at::CPUGeneratorImpl>((words[0] * 0x9e3779b97f4a7c15ull) ^ (words[1] + 0x7f4a7c15ull));
}

// The default CPU generator stands in for the device's while a CPU kernel draws from it.
struct Drawing {
    at::Generator standard = at::globalContext().defaultGenerator(at::kCPU);
    at::Tensor kept;
    explicit Drawing(const at::Generator &generator) {
        if (!generator.defined()) return;
        kept = standard.get_state();
        standard.set_state(generator.get_state());
    }
    ~Drawing() { if (kept.defined()) standard.set_state(kept); }
};

using Computed = std::vector<at::Tensor> (*)(const Stack &);
extern const std::map<std::string, Computed> substitutes;

const std::set<std::string> shaped_by_data = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                              "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave.Tensor"};

struct OnHost : c10::OperatorKernel {
    Kernel original;
    Computed computed = nullptr;
    bool copies, random;
    OnHost(Kernel original, Computed computed, bool copies, bool random)
        : original(std::move(original)), computed(computed), copies(copies), random(random) {}

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
        const auto &schema = op.schema();
        size_t count = schema.arguments().size();
        if (depth && !copies) return original.callBoxed(op, keys, stack);
        Stack arguments(stack->end() - count, stack->end());
        if (copies && !(on_device(arguments[0].toTensor()) && on_device(arguments[1].toTensor())))
            return original.callBoxed(op, keys, stack);  // to or from the host: conversions on the device are nested
        at::AutoDispatchBelowADInplaceOrView guard;
        at::Generator generator = random ? generator_of(arguments) : at::Generator();
        fc_flush();
        std::vector<std::pair<at::Tensor, at::Tensor>> before;  // of what is written in place
        auto keep = [&](const at::Tensor &tensor) { if (on_device(tensor) && tensor.numel()) before.emplace_back(tensor, host_view(tensor).clone()); };
        for (size_t i = 0; i < count; i++) {
            const auto *alias = schema.arguments()[i].alias_info();
            if (!alias || !alias->isWrite() || schema.arguments()[i].is_out()) continue;
            if (arguments[i].isTensor()) keep(arguments[i].toTensor());
            else if (arguments[i].isTensorList()) for (const at::Tensor &tensor : arguments[i].toTensorList()) keep(tensor);
        }
        {
            Nested nested;
            original.callBoxed(op, keys, stack);
        }
        if (fc_capturing()) return;
        fc_flush();
        for (auto &[tensor, bytes] : before)
            if (tensor.sizes().equals(bytes.sizes())) host_view(tensor).copy_(bytes);
        size_t results = schema.returns().size();
        if (computed) {
            Stack host;
            for (const IValue &value : arguments) host.push_back(down(value, generator));
            Drawing drawing(generator);
            std::vector<at::Tensor> made = computed(host);
            for (size_t i = 0; i < made.size() && i < results; i++) give((*stack)[stack->size() - results + i], made[i]);
            return;
        }
        Stack host;
        for (const IValue &value : arguments) host.push_back(down(value, generator));
        Stack views = host;
        Drawing drawing(generator);
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
        for (size_t i = 0; i < count; i++) {  // an `out` that the CPU kernel resized
            const auto *alias = schema.arguments()[i].alias_info();
            if (alias && alias->isWrite()) give(arguments[i], views[i]);
        }
        for (size_t i = 0; i < results; i++)
            if (!schema.returns()[i].alias_info()) {
                IValue &result = (*stack)[stack->size() - results + i];
                if (host[i].isTensor() || host[i].isTensorList()) give(result, host[i]);
                else result = host[i];  // a number or a truth
            }
    }
};

// Results whose shape depends on values: the CUDA path would read them from memory that no kernel has written.
struct Shaped : c10::OperatorKernel {
    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
        size_t count = op.schema().arguments().size();
        fc_flush();
        at::AutoDispatchBelowADInplaceOrView guard;
        at::Device device(at::kCUDA);
        Stack host;
        for (auto value = stack->end() - count; value != stack->end(); ++value) {
            if (value->isTensor() && on_device(value->toTensor())) device = value->toTensor().device();
            host.push_back(down(*value, {}));
        }
        fc_launch(nullptr, op.schema().name().c_str(), 0);
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
        stack->resize(stack->size() - count);
        for (const IValue &value : host) {
            if (!value.isTensor() || !value.toTensor().defined()) { stack->push_back(value); continue; }
            at::Tensor made = at::empty(value.toTensor().sizes(), value.toTensor().options().device(device));
            give(made, value.toTensor());
            stack->push_back(made);
        }
    }
};

// Operators that exist on a GPU alone, by what a CPU has for them.

std::vector<at::Tensor> all(const std::tuple<at::Tensor, at::Tensor> &made) { return {std::get<0>(made), std::get<1>(made)}; }
std::vector<at::Tensor> all(const std::tuple<at::Tensor, at::Tensor, at::Tensor> &made) { return {std::get<0>(made), std::get<1>(made), std::get<2>(made)}; }
std::optional<at::Tensor> maybe(const IValue &value) { return value.isTensor() && value.toTensor().defined() ? std::optional(value.toTensor()) : std::nullopt; }
std::optional<double> scale(const IValue &value) { return value.isNone() ? std::nullopt : std::optional(value.toDouble()); }

// Attention in float, from its definition: softmax(q k^T scale + bias, causal) v, and the log of the softmax's denominator.
struct Attention { at::Tensor q, k, v, p, lse; double scale; };
Attention attend(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, const std::optional<at::Tensor> &bias, bool causal, std::optional<double> factor) {
    Attention a{query.to(at::kFloat), key.to(at::kFloat), value.to(at::kFloat), {}, {}, factor.value_or(1 / std::sqrt((double)query.size(-1)))};
    if (a.k.size(1) != a.q.size(1)) {  // grouped queries
        a.k = a.k.repeat_interleave(a.q.size(1) / a.k.size(1), 1);
        a.v = a.v.repeat_interleave(a.q.size(1) / a.v.size(1), 1);
    }
    at::Tensor scores = at::matmul(a.q, a.k.transpose(-2, -1)) * a.scale;
    if (bias) scores = scores + bias->to(at::kFloat);
    if (causal) scores = scores.masked_fill(at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1), -INFINITY);
    a.lse = at::logsumexp(scores, {-1});
    a.p = at::exp(scores - a.lse.unsqueeze(-1));
    return a;
}
std::vector<at::Tensor> attend_back(const at::Tensor &gradient, const Attention &a, const at::Tensor &query, const at::Tensor &key) {
    at::Tensor g = gradient.to(at::kFloat), dv = at::matmul(a.p.transpose(-2, -1), g), dp = at::matmul(g, a.v.transpose(-2, -1));
    at::Tensor ds = a.p * (dp - (dp * a.p).sum(-1, true)), dq = at::matmul(ds, a.k) * a.scale, dk = at::matmul(ds.transpose(-2, -1), a.q) * a.scale;
    if (key.size(1) != query.size(1)) {
        int64_t groups = query.size(1) / key.size(1);
        dk = dk.reshape({dk.size(0), key.size(1), groups, dk.size(2), dk.size(3)}).sum(2);
        dv = dv.reshape({dv.size(0), key.size(1), groups, dv.size(2), dv.size(3)}).sum(2);
    }
    return {dq.to(query.scalar_type()), dk.to(query.scalar_type()), dv.to(query.scalar_type()), ds};
}
at::Tensor padded(const at::Tensor &lse) {  // the efficient kernel keeps rows of a multiple of 32
    int64_t rows = (lse.size(-1) + 31) / 32 * 32;
    return at::constant_pad_nd(lse, {0, rows - lse.size(-1)}, INFINITY);
}
at::Tensor batch_first(const at::Tensor &tensor) { return tensor.transpose(1, 2); }

const std::map<std::string, Computed> substitutes = {
    {"aten::_scaled_dot_product_flash_attention", [](const Stack &s) -> std::vector<at::Tensor> {  // q k v dropout causal debug scale
        auto a = attend(s[0].toTensor(), s[1].toTensor(), s[2].toTensor(), {}, s[4].toBool(), scale(s[6]));
        return {at::matmul(a.p, a.v).to(s[0].toTensor().scalar_type()), a.lse};
    }},
    {"aten::_scaled_dot_product_flash_attention_backward", [](const Stack &s) -> std::vector<at::Tensor> {  // g q k v out lse cq ck mq mk dropout causal seed offset scale
        auto a = attend(s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), {}, s[11].toBool(), scale(s[14]));
        auto made = attend_back(s[0].toTensor(), a, s[1].toTensor(), s[2].toTensor());
        return {made[0], made[1], made[2]};
    }},
    {"aten::_scaled_dot_product_efficient_attention", [](const Stack &s) -> std::vector<at::Tensor> {  // q k v bias lse? dropout causal scale
        auto a = attend(s[0].toTensor(), s[1].toTensor(), s[2].toTensor(), maybe(s[3]), s[6].toBool(), scale(s[7]));
        return {at::matmul(a.p, a.v).to(s[0].toTensor().scalar_type()), s[4].toBool() ? padded(a.lse) : at::Tensor()};
    }},
    {"aten::_scaled_dot_product_efficient_attention_backward", [](const Stack &s) -> std::vector<at::Tensor> {  // g q k v bias out lse seed offset dropout mask causal scale
        auto a = attend(s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), maybe(s[4]), s[11].toBool(), scale(s[12]));
        auto made = attend_back(s[0].toTensor(), a, s[1].toTensor(), s[2].toTensor());
        return made;
    }},
    {"aten::cudnn_convolution", [](const Stack &s) -> std::vector<at::Tensor> {  // x w padding stride dilation groups ...
        return {at::convolution(s[0].toTensor(), s[1].toTensor(), {}, s[3].toIntVector(), s[2].toIntVector(), s[4].toIntVector(), false,
                                std::vector<int64_t>(s[2].toIntVector().size(), 0), s[5].toInt())};
    }},
    {"aten::cudnn_convolution_transpose", [](const Stack &s) -> std::vector<at::Tensor> {  // x w padding output_padding stride dilation groups
        return {at::convolution(s[0].toTensor(), s[1].toTensor(), {}, s[4].toIntVector(), s[2].toIntVector(), s[5].toIntVector(), true, s[3].toIntVector(), s[6].toInt())};
    }},
    {"aten::_conv_depthwise2d", [](const Stack &s) -> std::vector<at::Tensor> {  // x w kernel bias stride padding dilation
        return {at::convolution(s[0].toTensor(), s[1].toTensor(), maybe(s[3]), s[4].toIntVector(), s[5].toIntVector(), s[6].toIntVector(), false, {0, 0}, s[0].toTensor().size(1))};
    }},
    {"aten::cudnn_batch_norm", [](const Stack &s) -> std::vector<at::Tensor> {  // x w b mean var training momentum epsilon
        return all(at::native_batch_norm(s[0].toTensor(), maybe(s[1]), maybe(s[2]), maybe(s[3]), maybe(s[4]), s[5].toBool(), s[6].toDouble(), s[7].toDouble()));
    }},
    {"aten::cudnn_batch_norm_backward", [](const Stack &s) -> std::vector<at::Tensor> {  // x g w mean var save_mean save_var epsilon reserve
        return all(at::native_batch_norm_backward(s[1].toTensor(), s[0].toTensor(), maybe(s[2]), maybe(s[3]), maybe(s[4]), maybe(s[5]), maybe(s[6]), true, s[7].toDouble(), {true, true, true}));
    }},
};

const std::set<std::string> kept = {  // allocation and what looks at no values, or reads one value by a copy
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::record_stream", "aten::is_set_to", "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense", "aten::_to_copy",
};

}  // namespace

extern "C" __attribute__((visibility("default"))) int fc_install(void) {
    auto &dispatcher = c10::Dispatcher::singleton();
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
    names.emplace_back("aten::copy_", "");
    int number = 0;
    struct Silent : c10::WarningHandler { void process(const c10::Warning &) override {} } silent;  // torch warns that kernels are replaced
    c10::WarningUtils::WarningHandlerGuard quiet(&silent);
    for (const auto &name : names) {
        std::string full = toString(name);
        if (name.name.rfind("aten::", 0) || kept.count(full)) continue;
        auto op = dispatcher.findSchema(name);
        if (!op) continue;
        bool view = false;
        for (const auto &result : op->schema().returns()) view |= result.alias_info() && !result.alias_info()->isWrite();
        if (view) continue;
        auto overload = full.substr(6);
        if (shaped_by_data.count(full)) {
            library.impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Shaped>()));
            number++;
            continue;
        }
        auto found = substitutes.find(full);
        if (found == substitutes.end() && !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) { fc_note(full.c_str()); continue; }
        library.impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OnHost>(
            kernel_of(*op, c10::DispatchKey::CUDA), found == substitutes.end() ? nullptr : found->second,
            full == "aten::copy_", op->hasTag(at::Tag::nondeterministic_seeded))));
        number++;
    }
    fc_arithmetic();
    return number;
}
