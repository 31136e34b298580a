// A host without Python: tensors in, logits out, over a bundle's text graph on ONNX Runtime.
//
//     clef::Session session("clef-flash.bundle", "…/libonnxruntime.so.1.32.0");
//     clef::TensorFile request = clef::read_safetensors("request.safetensors");  // of: clef-trt encode
//     clef::Logits logits = session.run(request.tensors);
//
// What a TensorRT host does in the place of `Session`, with the same files and the same `run`:
//   1. Of the manifest's `plans` it takes one whose `compute_capabilities` name the card, and reads `files.text`.
//      The plan has the weights in it; `weights` is not needed.
//   2. A runtime deserialises it; per entry of `profiles.text`, whose order is the plan's, a context is made and
//      `setOptimizationProfileAsync` called with its index.
//   3. A pass takes the profile of the shortest sequences that holds the sizes of every dynamic axis, and pads what is
//      below its minimum: option_questions and media_rows with -1, everything else with 0.
//   4. `setInputShape` and `setTensorAddress` per input of the manifest's graph, `setTensorAddress` of `logits`, then
//      `enqueueV3`. Float tensors of the plan may be BF16 where the manifest says float32: ask `getTensorDataType`.
//   5. The logits are cut to [batch, options] of the tensors given.
// clef_trt/tensorrt.py and execution.py do that in Python, with buffers kept from pass to pass and CUDA graphs.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clef_files.hpp"
#include "clef_onnxruntime.hpp"

namespace clef {

// Whether ONNX Runtime's products of uint8 and int8 overflow 16 bits here: x86 without VNNI (see clef_trt/engine.py).
inline bool products_saturate() {
#if defined(__x86_64__)
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("flags", 0) == 0)
            return (line + ' ').find(" avx512_vnni ") == std::string::npos &&
                   (line + ' ').find(" avx_vnni ") == std::string::npos;
    return true;
#else
    return false;
#endif
}

// A bundle's text graph, opened. `run` may be called from several threads.
class Session {
public:
    // `library`: ONNX Runtime's. `threads`: of one pass, 0 for one per core. `weights`: where a release lies that
    // moved. Throws Error(bundle) or Error(engine).
    Session(const std::filesystem::path& folder, const std::string& library, int threads = 0,
            const std::filesystem::path& weights = {})
        : bundle_(open_bundle(folder, weights)),
          library_(library),
          env_(library_),
          memory_(library_),
          graph_(library_) {
        if (bundle_.precision != "fp32" && bundle_.precision != "int8")
            throw Error(Kind::engine,
                        folder.string() + " is " + bundle_.precision + "; ONNX Runtime runs fp32 and int8");
        if (bundle_.outputs.size() != 1) throw Error(Kind::bundle, folder.string() + ": expected one output, logits");
        library_.call<ort::CreateEnv>(ort::warnings, "clef", env_.place());
        library_.call<ort::CreateCpuMemoryInfo>(ort::device_allocator, ort::default_memory, memory_.place());
        ort::Owned<ort::Options, ort::ReleaseSessionOptions> options(library_);
        library_.call<ort::CreateSessionOptions>(options.place());
        library_.call<ort::SetIntraOpNumThreads>(options.get(), threads);
        // Shapes change from pass to pass: remembering each one's memory plan only costs memory.
        library_.call<ort::DisableMemPattern>(options.get());
        if (bundle_.precision == "int8" && products_saturate())
            library_.call<ort::AddSessionConfigEntry>(options.get(), "session.x64quantprecision", "1");
        // The graph is given as bytes, so it has no folder of its own to look for its weights in.
        library_.call<ort::AddSessionConfigEntry>(options.get(), "session.model_external_initializers_file_folder_path",
                                                  bundle_.weights.c_str());
        const Bytes model = read_file(bundle_.graph);
        library_.call<ort::CreateSessionFromArray>(env_.get(), model.data(), model.size, options.get(), graph_.place());
    }

    const Bundle& bundle() const { return bundle_; }
    const std::string& onnxruntime_version() const { return library_.version(); }

    // One pass. `inputs`: those of the manifest's text graph, in any order. Throws Error(engine).
    Logits run(const std::vector<Tensor>& inputs) const {
        const auto& options = find(inputs, "option_questions").shape;
        if (options.size() != 2) throw Error(Kind::engine, "option_questions has not two axes");
        Logits result{options[0], options[1], {}};
        result.values.resize(find(inputs, "option_questions").count());
        run(inputs, result.values.data());
        return result;
    }

    // The same into the caller's memory: batch × options numbers, written in place.
    void run(const std::vector<Tensor>& inputs, float* logits) const {
        const auto sizes = check(inputs);
        std::vector<std::unique_ptr<OwnedValue>> values;
        std::vector<const char*> names;
        std::vector<const ort::Value*> given;
        for (const auto& tensor : inputs) {
            // Inputs are only read; the interface has one function for both.
            values.push_back(value(tensor.type, tensor.shape, const_cast<void*>(tensor.data)));
            names.push_back(tensor.name.c_str());
            given.push_back(values.back()->get());
        }
        const auto& record = bundle_.outputs[0];
        std::vector<std::int64_t> shape;
        for (const auto& axis : record.axes) {
            if (!axis.name.empty() && sizes.count(axis.name) == 0)
                throw Error(Kind::bundle, "the manifest gives no input the axis " + axis.name + " of the output");
            shape.push_back(axis.name.empty() ? axis.size : sizes.at(axis.name));
        }
        const auto output = value(record.type, shape, logits);
        const char* output_name = record.name.c_str();
        ort::Value* target = output->get();
        library_.call<ort::Run>(graph_.get(), static_cast<const void*>(nullptr), names.data(), given.data(),
                                given.size(), &output_name, std::size_t{1}, &target);
    }

private:
    using OwnedValue = ort::Owned<ort::Value, ort::ReleaseValue>;

    // Released in the opposite order: the session before the environment.
    Bundle bundle_;
    ort::Library library_;
    ort::Owned<ort::Env, ort::ReleaseEnv> env_;
    ort::Owned<ort::MemoryInfo, ort::ReleaseMemoryInfo> memory_;
    ort::Owned<ort::Graph, ort::ReleaseSession> graph_;

    std::unique_ptr<OwnedValue> value(Type type, const std::vector<std::int64_t>& shape, void* data) const {
        auto result = std::make_unique<OwnedValue>(library_);
        const Tensor tensor{"", type, shape, data};
        library_.call<ort::CreateTensorWithDataAsOrtValue>(
            memory_.get(), data, tensor.bytes(), tensor.shape.data(), tensor.shape.size(),
            type == Type::int64 ? ort::int64 : ort::float32, result->place());
        return result;
    }

    // The sizes of the dynamic axes; throws Error(engine) for inputs outside the manifest's contract.
    std::map<std::string, std::int64_t> check(const std::vector<Tensor>& inputs) const {
        if (inputs.size() != bundle_.inputs.size())
            throw Error(Kind::engine, "there are " + std::to_string(inputs.size()) + " inputs; expected " +
                                          std::to_string(bundle_.inputs.size()));
        std::map<std::string, std::int64_t> sizes;
        for (const auto& record : bundle_.inputs) {
            const Tensor& tensor = find(inputs, record.name);
            if (tensor.type != record.type || tensor.shape.size() != record.axes.size())
                throw Error(Kind::engine, record.name + " is " + name_of(tensor.type) + " with " +
                                              std::to_string(tensor.shape.size()) + " axes; expected " +
                                              name_of(record.type) + " with " + std::to_string(record.axes.size()));
            for (std::size_t i = 0; i < record.axes.size(); ++i) {
                const auto& axis = record.axes[i];
                const auto expected =
                    axis.name.empty() ? axis.size : sizes.emplace(axis.name, tensor.shape[i]).first->second;
                if (tensor.shape[i] != expected || expected < 1)
                    throw Error(Kind::engine, "axis " + std::to_string(i) + " of " + record.name + " is " +
                                                  std::to_string(tensor.shape[i]) + "; expected " +
                                                  std::to_string(expected) +
                                                  (axis.name.empty() ? "" : " " + axis.name));
            }
        }
        return sizes;
    }
};

}  // namespace clef
