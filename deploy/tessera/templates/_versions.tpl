{{- /* Refuses versions of Kubernetes on which Tessera was never tested. The suffix -0 admits names such as v1.35.4-gke.100. */ -}}
{{- define "tessera.tested" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- if not (or .Values.allowUntestedKubernetes (semverCompare ">=1.34.0-0 <1.38.0-0" $version)) -}}
  {{- fail (printf "Tessera %s was not tested on Kubernetes %s, only on 1.34 to 1.37 (docs/versions.md); allowUntestedKubernetes=true installs it all the same" .Chart.AppVersion $version) -}}
{{- end -}}
{{- end -}}

{{- /*
"true" if the offers of one GPU are disjoint, else empty: API servers before 1.36 do not keep counters, and the controller does not
use those of 1.36, because its scheduler is slow with them.
*/ -}}
{{- define "tessera.disjoint" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- $mode := ternary .Values.controller.offerMode "counters" .Values.controller.enabled -}}
{{- if or (semverCompare "<1.36.0-0" $version) (eq $mode "disjoint") (and (eq $mode "auto") (semverCompare "<1.37.0-0" $version)) -}}true{{- end -}}
{{- end -}}
